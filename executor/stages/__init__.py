"""Layers behind the `Stage` protocol: Megatron's, plain torch's, and ones that sleep. In: a micro-batch's tensors and
the neighbours' buffers. Out: outputs, input gradients, and sums of weight gradients. The engine calls it.
"""
