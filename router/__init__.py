"""Where should this request go: door, dispatch, policy, view, prefix index, admission, tokenizer."""
