"""A model's costs on this device. In: the shape of a model. Out: seconds and bytes of its actions, measured as the
engine runs them. `dynapipe profile`, and `dynapipe train` where it was given no costs, call it.
"""
