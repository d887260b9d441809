# Image of the agent. Vendor libraries are not in it: they come from the host, where they fit the driver.
#
#   docker build --build-arg BASE=docker.io/library/python:3.13-slim-bookworm@sha256:... \
#     --build-arg SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) -t alloy-agent .
#
# BASE has no default, so that nobody builds on whatever a tag means today: give it with its digest.
ARG BASE

FROM ${BASE} AS build
ARG SOURCE_DATE_EPOCH=0
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY alloy_agent ./alloy_agent
COPY alloy_brain ./alloy_brain
# Exactly the locked versions, as wheels: nothing is compiled here or on the node.
RUN python -m venv /opt/alloy \
 && /opt/alloy/bin/pip install --only-binary :all: -c requirements.lock . \
 && /opt/alloy/bin/pip inspect > /opt/alloy/inventory.json \
 && /opt/alloy/bin/pip uninstall -y pip \
 && find /opt/alloy -name __pycache__ -prune -exec rm -rf {} + \
 && find /opt/alloy -exec touch -h -d @${SOURCE_DATE_EPOCH} {} +

FROM ${BASE}
COPY --from=build /opt/alloy /opt/alloy
ENV PATH=/opt/alloy/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="alloy-agent" \
      org.opencontainers.image.licenses="Apache-2.0"
# Root: MIG, sysfs partition files and the kubelet's directories belong to it. The brain needs none of
# that: run it as `--user 65532 --entrypoint alloy-brain`.
USER 0:0
ENTRYPOINT ["alloy-agent"]
CMD ["run"]
