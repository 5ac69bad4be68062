"""What people talk to: the command line. It knows the engine by jaxllm's public names only.

cli.py            `jaxllm generate` and the entry point
chat.py           `jaxllm chat`: the conversation in a terminal
chat_session.py   the conversation itself
options.py        command line options from the fields of a dataclass
terminal.py       a streamed answer on the terminal, and Ctrl-C
figures.py        what a command measured
"""
