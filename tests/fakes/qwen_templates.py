"""Chat templates that do with thoughts what those of Qwen3 and Qwen3.5 do, in few lines.

Both leave the thoughts of turns before the last question out. QWEN3 leaves it to the model to open a thought,
and writes an empty one where thinking is off; QWEN35 opens it.
"""

from __future__ import annotations

_TURNS = """
{%- set last = namespace(query=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set last.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content | trim %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > last.query and thought %}
            {%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
"""

QWEN3 = (
    _TURNS
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
)

QWEN35 = (
    _TURNS
    + """
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""
)
