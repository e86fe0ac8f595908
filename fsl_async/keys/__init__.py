"""Who a node is and whom it trusts: its key pair, the list of keys it lets in, and which name
belongs to which key.
"""
