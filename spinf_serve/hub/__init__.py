"""Weights from the Hugging Face Hub: found on this machine, else downloaded at a pinned commit.

`cache` looks, `download` and `head` run the download process (`python -m spinf_serve.hub`), which alone imports
huggingface_hub: `fetch`, `remote` and `store` are its parts.
"""
