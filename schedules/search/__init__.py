"""The joint search: from starts to the cuts, recomputation modes, replicas and order with the shortest simulated step.
`optimizer.py` calls the native core on a `Problem`; `flow_shop.py` orders forward-only steps."""
