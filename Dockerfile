# Image of the agent. Vendor libraries are not in it: they come from the host, where they fit the driver.
#
#   python scripts/bundle.py wheels wheels --python 3.13
#   docker build --network none --build-arg BASE=docker.io/library/python:3.13-slim-bookworm@sha256:... \
#     --build-arg SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) -t alloy-agent .
#
# With podman or buildah, `--timestamp $(git log -1 --format=%ct)` makes two builds the same to the bit.
# BASE has no default, so that nobody builds on whatever a tag means today: give it with its digest.
# Its interpreter is the one that the wheels were collected for.
ARG BASE

FROM ${BASE} AS build
ARG SOURCE_DATE_EPOCH=0
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1
COPY wheels /wheels
# Exactly these files, by their hashes, as wheels: nothing is fetched, nothing is compiled.
RUN python3 -m venv /opt/alloy \
 && /opt/alloy/bin/pip install --no-index --find-links /wheels --require-hashes --no-deps --no-compile \
      --requirement /wheels/requirements.txt \
 && /opt/alloy/bin/pip check \
 && /opt/alloy/bin/pip uninstall --quiet --yes pip setuptools \
 && cp /wheels/sbom.cdx.json /opt/alloy/ \
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
