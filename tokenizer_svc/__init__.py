"""The tokenizer service: prompts as text, ids or messages become checked token ids."""
