"""Structured output: a child process first tries each grammar, then the worker compiles it, and matchers compute its masks.

Path of a grammar: book.open() → compiler_pool → compiler_child (translates the grammar to EBNF, or to xgrammar's form of a
structural tag, and runs a trial) → compiler_pool (compiles the EBNF or tag) → book → matcher. core and exec import nothing from
this package.
"""
