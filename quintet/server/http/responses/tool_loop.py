"""Runs a response in rounds: the model generates, tool servers carry out its calls, the model continues."""

import asyncio
from collections.abc import AsyncIterator

from quintet.chat.output_parser import OutputParser
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall
from quintet.server.http.responses.conversation import ConversationPlan, next_plan
from quintet.server.http.responses.mcp.items import MAX_CALLS, McpCallBuilder, ResponseEvent
from quintet.server.http.responses.request import CreateResponse
from quintet.server.http.responses.response_builder import ResponseReply
from quintet.server.http.sse import encode
from quintet.server.http.usage import RequestUsage
from quintet.server.mcp.results import ToolResult


class ResponseRounds:
    """Rounds of one response; one round without tool servers."""

    def __init__(
        self, service: AppState, body: CreateResponse, plan: ConversationPlan, reply: ResponseReply, tally: RequestUsage
    ) -> None:
        self._service, self._body = service, body
        self._plan, self._reply, self._tally = plan, reply, tally
        self._left = MAX_CALLS if body.max_tool_calls is None else min(body.max_tool_calls, MAX_CALLS)
        self._told = False  # the model has read that no more calls are carried out

    async def steps(self, call: EngineCall) -> AsyncIterator[list[ResponseEvent]]:
        """Yields the steps that the engine call adds to the reply, until its last round has ended."""
        shown = self._reply.output.add_tool_lists(self._plan.new_lists)
        if self._plan.conversation.approved:
            yield [
                *shown,
                *(
                    step
                    for each in self._plan.conversation.approved
                    for step in self._reply.output.add_call(each.request)
                ),
            ]
            shown = []
            yield await call.run_between(self._carry_out())
            if not await self._goes_on(call):
                return
        while True:
            async for number, output in call:
                self._tally.count_output(number, output)
                yield shown + await self._reply.add_output(output)
                shown = []
            if not self._reply.has_calls_to_run:
                return
            yield self._reply.output.pause()
            batches = self._told
            yield await call.run_between(self._carry_out())
            if self._reply.output.needs_client or batches or not await self._goes_on(call):
                return

    async def _goes_on(self, call: EngineCall) -> bool:
        """Begins the next round; returns False if no tokens are left for it."""
        plan = await call.run_between(self._next())
        if plan is None:
            self._reply.end_incomplete()
            return False
        self._plan = plan
        self._tally.count_prompts([plan.request])
        self._reply.begin_round(OutputParser(plan.output_format))
        call.submit_next(plan.request)
        return True

    async def _next(self) -> ConversationPlan | None:
        items = encode(self._reply.output.items("completed"))
        return await next_plan(self._service, self._body, self._plan, items, self._reply.num_tokens)

    async def _carry_out(self) -> list[ResponseEvent]:
        """Runs all calls of a round concurrently; returns their results in the order of the calls."""
        waiting = self._reply.output.waiting_calls
        results = await asyncio.gather(*(self._result(each) for each in waiting.values()))
        return [
            step
            for place, result in zip([*waiting], results, strict=True)
            for step in self._reply.output.add_result(place, result)
        ]

    async def _result(self, call: McpCallBuilder) -> ToolResult:
        self._left -= 1
        if self._left < 0:
            self._told = True
            return ToolResult("no more tools may be called for this answer; answer with what is known", failed=True)
        return await self._plan.served_tools.servers[call.name].call(call.name, call.arguments)
