"""A chat template that plays the model: with the stub engine, which says what follows `!say:`.

It asks for the first tool, with the arguments of `SCRIPTED_ARGUMENTS`, and then says what the tool gave back. So any
client can run its tool loop against it, whatever it puts into its prompts.
"""

import json

SCRIPTED_ARGUMENTS = {"city": "Zürich"}

SCRIPTED_TEMPLATE = """\
{%- set last = messages[-1] %}
{%- for message in messages %}{{ "[" + message.role + "]" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}{{ "[call]" + call.function.name + (call.function.arguments | tojson) }}
{%- endfor %}{%- endfor %}
{%- if last.role == "tool" %}{{ "!say:The tool says: " + last.content }}
{%- elif tools %}{{ '!say:<tool_call>{"name": "' + tools[0].function.name + '", "arguments": ARGUMENTS}</tool_call>' }}
{%- else %}{{ "!say:I have no tools." }}
{%- endif %}{{ "[assistant]" }}""".replace("ARGUMENTS", json.dumps(SCRIPTED_ARGUMENTS))
