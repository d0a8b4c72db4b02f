"""Structured output: grammars compiled in processes that can be killed, and matchers that give masks to the executor.

The way of a grammar: book.open → compiler_pool → compiler_child (schema, regex or tag → EBNF → xgrammar, then a trial run)
→ book → Matcher. Nothing here is imported by core or exec.
"""
