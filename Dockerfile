# docker build -t gossamer . && docker run --rm gossamer demo
# With GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 and docker run --gpus all; between machines: --network host.
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /gossamer
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt torch --index-url ${TORCH_INDEX}
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt '.[keys]'
WORKDIR /runs
ENTRYPOINT ["gossamer"]
