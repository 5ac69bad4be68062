"""From what a user calls a model to its config, weights and tokenizer."""

import logging

# transformers, imported later for its tokenizers, would advise to install PyTorch.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.msg)
