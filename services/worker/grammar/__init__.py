"""Structured output: grammars are compiled in processes that can be killed, and matchers compute masks for the executor.

Path of a grammar: book.open() → compiler_pool → compiler_child (schema, regex or tag → EBNF → xgrammar, then a trial) → book →
matcher. core and exec import nothing from this package.
"""
