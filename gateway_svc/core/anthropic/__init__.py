"""Anthropic's Messages: another spelling of a chat, whose replies are blocks."""
