"""Structured output: a grammar is tried in a process that can be killed and then compiled here; matchers compute its masks.

Path of a grammar: book.open() → compiler_pool → compiler_child (schema, regex or tag → EBNF → xgrammar, then a trial) →
compiler_pool (compiles the EBNF or tag) → book → matcher. core and exec import nothing from this package.
"""
