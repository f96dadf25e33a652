"""Reads requests and answers of all supported APIs (dialects) as OpenAI chat messages."""
