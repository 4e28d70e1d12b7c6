"""What published models are: one trade for conversion, estimates and cost models. In: a config.json, Megatron's
arguments or a name. Out: an `Architecture`, with every tensor, parameter and FLOP of it. No torch.
"""
