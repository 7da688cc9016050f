# The environment of `make setup`, with the pins of constraints*.txt, at the clone's usual place. The base is 3.12-slim of August 2026.
# The image has what is committed in the clone and nothing that lies beside it, and its programs do not run as root.
#   docker build --tag mlm-repro .                        the CPU build of torch
#   docker build --tag mlm-repro --build-arg TORCH=cuda . the CUDA build
#   docker run --rm --gpus all --volume "$PWD/runs:/mlm-repro/runs" mlm-repro mlm-experiment reproduce 355m --dry-run
# A folder that is mounted belongs to you: where your user is not number 1000, add --user "$(id -u)" and --env HOME=/tmp.
FROM python:3.12-slim@sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36 AS tracked
RUN apt-get update && apt-get install --yes --no-install-recommends git
COPY . /clone
RUN git clone --quiet --no-local /clone /mlm-repro

FROM python:3.12-slim@sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36
ARG TORCH=cpu
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 mlm
COPY --from=tracked --chown=mlm /mlm-repro /mlm-repro
USER mlm
WORKDIR /mlm-repro
RUN make setup TORCH=$TORCH && rm -rf ~/.cache && mkdir -p runs
ENV PATH=/mlm-repro/.venv/bin:$PATH
CMD ["mlm-experiment", "--help"]
