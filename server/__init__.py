"""What people talk to: the command line, and the HTTP server. They know the engine by jaxllm's public names only.

The server, from the outside in:

    serve.py             `jaxllm serve`: owns the port and the engine's process, and ends in good order
    server_config.py, server_logging.py
    http_worker.py       one HTTP process; worker_process.py: starts it again if it dies; board.py: what all of them see
    stand_in.py          answers while no HTTP process does
    http_protocol.py     the connection, with limits on slow clients; request_head.py: what a request must be;
                         descriptor_reserve.py: for probes when there are too many connections
    app.py               the application, and `Server`: what every route shares
    limits.py            middlewares: bodies, request ids; api_errors.py: every answer with an error
    content_encoding.py, json_fault.py
    keys.py, drain.py, watchdog.py
    routes/              the endpoints; protocol/: what they read and write, as pydantic models
    call.py              what a request says beside its body
    client_watch.py      whether the client is still there
    generation.py        one prompt on its way through the engine; generation_group.py: several of one request;
                         deltas.py: what comes of them; request_account.py: what was made, whoever reads it
    prompt_encoder.py, chat_templates.py; chat_input.py, response_input.py: what requests give them
    reply.py             an answer taken apart into reasoning, content and tool calls; parsers/: how models write them
    completion_answer.py, chat_answer.py, response_builder.py, message_builder.py, streaming.py: the answers
    event_stream.py      an answer that is sent as it is made
    response_store.py
    metrics.py, engine_metrics.py, recent.py, shared_counts.py, finished_request.py, request_log.py, tracing.py
    static/              the web page

The commands:

    cli.py               the entry point, and `jaxllm generate`; options.py: arguments from the fields of a dataclass
    chat.py, chat_session.py, remote_chat.py, terminal.py, answer.py, figures.py     `jaxllm chat`
    batch_runner.py, batch_file.py, app_client.py                                    `jaxllm run-batch`
    bench/               `jaxllm bench serve`
    http_client.py, http_response.py, sse_reader.py                                  what they talk to servers with
"""
