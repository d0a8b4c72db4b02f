"""Streams a chat completion with OpenAI's client. Usage: python examples/chat.py ["QUESTION"]"""

import os
import sys

from openai import OpenAI

url = os.environ.get("ROOTSTOCK_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("ROOTSTOCK_API_KEY", "none"))
model = client.models.list().data[0].id
question = sys.argv[1] if len(sys.argv) > 1 else "Count from 3 to 9."

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
usage = None
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    usage = chunk.usage or usage
print()
if usage:
    print(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens", file=sys.stderr)
