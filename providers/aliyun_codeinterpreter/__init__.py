"""The `aliyun_codeinterpreter` provider: Alibaba Cloud's Code Interpreter, through agentrun-sdk."""
