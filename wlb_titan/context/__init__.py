"""Context parallelism: who holds which tokens of a packed micro-batch, and what that costs (paper section 5).

A sharding lists the runs of documents that each rank holds: exactly total / ranks tokens, its share of the
padding last. A rank's attention segments (what its queries see) and its tokens' positions follow from it. A
strategy makes shardings, and knows what the ranks exchange.
"""
