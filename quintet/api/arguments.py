"""Arguments of LLM and AsyncLLM for editors and type checkers, which are in `arguments.pyi`; this file has none."""


class LLMArguments:
    """LLM.__init__ as a checker sees it."""


class AsyncLLMArguments:
    """AsyncLLM.__init__ as a checker sees it."""
