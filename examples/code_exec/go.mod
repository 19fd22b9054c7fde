module cofferdam/code_exec

go 1.19
