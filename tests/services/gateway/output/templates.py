"""Chat templates for an assistant's turn, one per family of models, written from the documentation of the formats.

The variables are `content`, `calls` (each with `name` and `arguments`), `reasoning` if the family writes it, and
`add_generation_prompt`. Some templates have further variables, such as `thinking`.
"""

from __future__ import annotations

from collections.abc import Mapping

TEMPLATES: Mapping[str, str] = {
    "hermes": (
        "{%- if reasoning %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}"
        "{{- content }}"
        "{%- for call in calls %}"
        "{%- if content or not loop.first %}{{ '\\n' }}{%- endif %}"
        "{{- '<tool_call>\\n{\"name\": ' + (call.name | tojson) }}"
        "{{- ', \"arguments\": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- if thinking is false %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    ),
    "qwen3_coder": (
        "{{- content }}"
        "{%- for call in calls %}{{ '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}"
        "{%- for key, value in call.arguments.items() %}"
        "{{- '<parameter=' + key + '>\\n' }}"
        "{{- (value | tojson if value is mapping or (value is sequence and value is not string) else value | string) }}"
        "{{- '\\n</parameter>\\n' }}"
        "{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    "llama3_json": (
        "{{- content }}{%- if tools_first and calls %}{{ '<|python_tag|>' }}{%- endif %}"
        "{%- for call in calls %}{%- if not loop.first %}{{ '; ' }}{%- endif %}"
        "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
    ),
    "pythonic": (
        "{{- content }}{%- if calls %}{{ '<|python_start|>[' }}"
        "{%- for call in calls %}{%- if not loop.first %}{{ ', ' }}{%- endif %}{{- call.name + '(' }}"
        "{%- for key, value in call.arguments.items() %}{%- if not loop.first %}{{ ', ' }}{%- endif %}"
        "{{- key + '=' + (['', value] | string)[5:-1] }}{%- endfor %}{{- ')' }}{%- endfor %}{{- ']<|python_end|>' }}{%- endif %}"
        "{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"
    ),
    "mistral": (
        "{%- if reasoning %}{{ '[THINK]' + reasoning + '[/THINK]' }}{%- endif %}"
        "{{- content }}"
        "{%- if old and calls %}{{ '[TOOL_CALLS] [' }}"
        "{%- for call in calls %}{%- if not loop.first %}{{ ', ' }}{%- endif %}"
        '{{- \'{"name": "\' + call.name + \'", "arguments": \' + (call.arguments | tojson) + \', "id": "abcdef123"}\' }}'
        "{%- endfor %}{{- ']' }}"
        "{%- else %}{%- for call in calls %}"
        "{{- '[TOOL_CALLS]' + call.name + '[CALL_ID]abcdef123[ARGS]' + (call.arguments | tojson) }}{%- endfor %}{%- endif %}"
    ),
    "deepseek_v3": (
        "{{- content }}{%- if calls %}{{ '<｜tool▁calls▁begin｜>' }}"
        "{%- for call in calls %}{%- if not loop.first %}{{ '\\n' }}{%- endif %}"
        "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + '\\n```json\\n' }}"
        "{{- (call.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}"
        "{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{%- endif %}"
    ),
    "deepseek_v31": (
        "{%- if reasoning %}{{ reasoning + '</think>' }}{%- endif %}"
        "{{- content }}{%- if calls %}{{ '<｜tool▁calls▁begin｜>' }}"
        "{%- for call in calls %}"
        "{{- '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' + (call.arguments | tojson) + '<｜tool▁call▁end｜>' }}"
        "{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}"
        "{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{%- endif %}"
    ),
    "harmony": (
        "{%- if reasoning %}{{ '<|channel|>analysis<|message|>' + reasoning + '<|end|><|start|>assistant' }}{%- endif %}"
        "{%- if content %}{{ '<|channel|>commentary<|message|>' + content + '<|end|><|start|>assistant' }}{%- endif %}"
        "{%- for call in calls %}{%- if not loop.first %}{{ '<|start|>assistant' }}{%- endif %}"
        "{{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"
    ),
}
