"""The import package of Rootstock: `services`, `kernels` and the generated modules of `protos`.

In a checkout, `make env` adds links to the folders services/ and kernels/ and generates rootstock_llm/protos/.
"""
