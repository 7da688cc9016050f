# The environment of `make setup`, with the pins of constraints*.txt, at the clone's usual place. The base is 3.12-slim of August 2026.
#   docker build --tag mlm-repro .                        the CPU build of torch
#   docker build --tag mlm-repro --build-arg TORCH=cuda . the CUDA build
#   docker run --rm --gpus all --volume "$PWD/runs:/mlm-repro/runs" mlm-repro mlm-experiment reproduce 355m --dry-run
FROM python:3.12-slim@sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36
ARG TORCH=cpu
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /mlm-repro
COPY . .
RUN make setup TORCH=$TORCH && rm -rf /root/.cache
ENV PATH=/mlm-repro/.venv/bin:$PATH
CMD ["mlm-experiment", "--help"]
