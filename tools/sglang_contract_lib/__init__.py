"""Parts of tools/sglang_contract.py."""
