"""Networks over the native API: a session's, and the attempts of a tenant's sandboxes."""

from __future__ import annotations

from uuid import UUID

from django.http import HttpResponse
from rest_framework.request import Request

from executions.capabilities.network.attempts import LIST, FoundAttemptShape, detail, list_attempts
from executions.capabilities.network.sessions import (
    PUT,
    SessionNetworkShape,
    network_of_session,
)
from executions.doors.native.frame import ApiView, deferred
from executions.doors.native.rendering import json_response, may_read, page_of
from executions.doors.native.schema import endpoint
from executions.doors.native.sessions import SessionApiView
from executions.kernel.bodies import PageShape
from executions.sessions.networks import change_network
from executions.sessions.queries import session_of


class SessionNetworkView(SessionApiView):
    @endpoint("get_session_network", answers={200: SessionNetworkShape})
    def get(self, request: Request, session_id: UUID) -> HttpResponse:
        """Get the network of a session.

        The session's own list, and the lists that hold around it.
        """
        return json_response(network_of_session(session_of(self.api_key.tenant, session_id)))

    @endpoint(
        "set_session_network", request=PUT, answers={200: SessionNetworkShape}, errors=(409, 502)
    )
    @deferred
    async def put(self, request: Request, session_id: UUID) -> HttpResponse:
        """Set the network of a session.

        It replaces the session's own list. Connections that are no longer allowed end. A session
        that sleeps is not woken.
        """
        session = self.session(session_id)
        session = await change_network(session, PUT.read(request.data).request, self.by())
        answer = network_of_session(session)
        if not may_read(self.api_key, session):
            answer["layers"] = answer["layers"][-1:]
        return json_response(answer)


class AttemptsView(ApiView):
    tag = "network"

    @endpoint(
        "list_network_attempts",
        parameters=(LIST,),
        answers={200: PageShape[FoundAttemptShape]},
    )
    def get(self, request: Request) -> HttpResponse:
        """List network attempts.

        What the tenant's sandboxes tried to reach, newest first.
        """
        wanted = LIST.read(request.query_params.dict())
        page = list_attempts(self.api_key.tenant, wanted)
        results = [detail(each) for each in page.attempts]
        return json_response(page_of(request, results, page.next_cursor))
