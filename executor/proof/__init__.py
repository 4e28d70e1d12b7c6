"""Proof that a step cannot hang. In: the instructions of all ranks. Out: bytes of buffers in flight on each, or a
`VerificationError` that names both ranks. Asked once for every plan, before anybody gets it.
"""
