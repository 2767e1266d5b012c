"""Making a corpus of text or conversations: what `wlb-titan prepare` does.

`prepare.py` is the way from sources to a folder on disk; `sources.py` reads texts and conversations,
`shapes.py` makes messages of other records, `chat.py` renders conversations, `tokenizer.py` trains or takes a
tokenizer and applies it. What is made here `wlb_titan.corpus` reads, which needs none of this.
"""
