# One image for every service. Layers go from what changes seldom to what changes often:
# packages, native kernels, sources.
FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
WORKDIR /app

FROM base AS builder
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
COPY pyproject.toml constraints.txt ./
COPY sdk/pyproject.toml sdk/
# TORCH_INDEX: a package index with builds of torch for one kind of device, such as PyTorch's
# index of CPU builds; without it pip takes what its own index has.
ARG TORCH_INDEX=
# The packages are installed as links to /app, so their sources may come later.
RUN --mount=type=cache,target=/root/.cache/pip \
    touch README.md sdk/README.md \
 && for package in services shared tools sdk/src/diptych; do \
      mkdir -p $package && touch $package/__init__.py; \
    done \
 && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt -e ./sdk -e .
COPY kernels kernels
COPY shared/__init__.py shared/file_lock.py shared/known_models.py shared/
COPY shared/kernels/__init__.py shared/kernels/build.py shared/kernels/
RUN python -m shared.kernels.build
# Headers and archives serve compilers only; triton (1 GB) serves GPUs only.
RUN if python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
      pip uninstall --quiet --yes triton; \
    fi \
 && site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && rm -rf $site/torch/include $site/torch/share \
 && find $site -name '*.a' -delete

FROM base
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --create-home diptych \
 && install -d -o diptych -g diptych -m 0700 \
      /run/diptych /etc/diptych /etc/diptych/keys \
      /home/diptych/.cache /home/diptych/.cache/diptych
COPY --from=builder /opt/venv /opt/venv
COPY --from=builder --chown=diptych:diptych /app/kernels /app/kernels
COPY --chown=diptych:diptych . .
RUN chown diptych:diptych /app && python -m compileall -q services shared tools sdk/src
USER diptych
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=30s --start-period=300s --retries=3 \
  CMD ["python", "-m", "tools.health", "/run/diptych"]
