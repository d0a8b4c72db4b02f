"""Requests JSON of a given schema with OpenAI's client, and parses the completion into a pydantic model."""

import os

from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


url = os.environ.get("ROOTSTOCK_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("ROOTSTOCK_API_KEY", "none"))
completion = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Give the JSON for name Ada, age 36."}],
    response_format=Person,
    temperature=0,
)
print(completion.choices[0].message.parsed)
