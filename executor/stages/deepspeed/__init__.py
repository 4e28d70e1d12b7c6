"""Stages whose gradients a DeepSpeed engine holds. In: parts, or any module. Out: engine and stage."""
