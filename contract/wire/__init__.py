"""Values of the domain that more than one hop or service carries, as messages of the contract and back.

What a single hop carries is in its two ends' own `wire`.
"""
