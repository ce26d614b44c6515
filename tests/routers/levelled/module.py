"""The router as a torch module, which moves the state after each step."""

from megatron_blackmamba.model.state_router import StateRouter


class LevelledRouter(StateRouter):
    def move(self):
        """Follow each expert's share of a step's tokens, which are in `gathered`."""
        share_E = self.gathered / self.gathered.sum().clamp(min=1)
        self.load.lerp_(share_E.to(self.load), 0.1)
