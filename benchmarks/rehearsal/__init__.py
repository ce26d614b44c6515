"""One training step on fake CUDA tensors: no GPU, no numerics, but every operation, wait and byte of a real one.

The process answers for torch.cuda as a machine of eight GPUs would (`fake_cuda.py`). So no stand-in for CUDA is
installed, and megatron-core, the optimizer and the Triton backends take their GPU paths.
Tensors have shapes and devices but no values (PyTorch's FakeTensorMode), collectives complete at once (its fake process
group), and Triton stops where it would launch. `record.py` writes down what happens.

These are private interfaces. `requirements.py` names the versions they were checked with.
"""
