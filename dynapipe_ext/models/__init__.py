"""What published models are. In: a config.json, Megatron's arguments or a name. Out: an `Architecture`, with every
tensor, parameter and FLOP of it. Conversion, estimates and cost models ask it. No torch.
"""
