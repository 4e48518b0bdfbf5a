"""Tokens that may come next, tried before they are known: who proposes them, and how many pay."""
