"""What LLM and AsyncLLM take, for editors and type checkers: `arguments.pyi` beside this says it; here is nothing."""


class LLMArguments:
    """LLM.__init__ as a checker sees it."""


class AsyncLLMArguments:
    """AsyncLLM.__init__ as a checker sees it."""
