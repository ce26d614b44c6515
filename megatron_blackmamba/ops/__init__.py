"""Mathematics on plain tensors: nothing here knows of Megatron; each op picks the best backend that the machine has."""
