"""Buffers between pipeline ranks. In: Send and Recv instructions. Out: pending transfers that the engine waits for:
over torch.distributed, within one process, under NCCL's strict rules for tests, or emulated: a link's time, no content.
"""
