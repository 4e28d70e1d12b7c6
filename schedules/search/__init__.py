"""The joint search: from starts, ways to cut a batch, to the cuts, recomputation, replicas and order with the shortest
simulated step. `optimizer.py` calls the native core on a `Problem`; `flow_shop.py` orders forward-only steps."""
