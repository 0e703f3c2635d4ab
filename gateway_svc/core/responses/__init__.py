"""OpenAI's Responses: another spelling of a chat, whose replies are items."""
