package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"log"
	"os"
	"sync"
	"time"
)

const script = `
def main(name, numbers):
    print("drawing a line under", name)
    with open("artifacts/line.csv", "wb") as file:
        file.write(bytes([255, 0]) * 200_000 if numbers[0] == 0 else b"1,2,3")
    return {"name": name, "sum": sum(numbers)}
`

func main() {
	python, manage := os.Getenv("CODE_EXEC_PYTHON_BIN"), os.Getenv("MANAGE")
	if python == "" {
		python = "python3"
	}
	folder, err := os.MkdirTemp("", "artifacts-")
	check(err)
	defer os.RemoveAll(folder)
	var client SandboxClient
	client, err = NewPythonProviderManagerClient(python, manage, folder)
	check(err)

	// Four callers at once.
	lines, all := make([]string, 4), sync.WaitGroup{}
	for n := range lines {
		all.Add(1)
		go func(n int) {
			defer all.Done()
			arguments := map[string]any{"name": "go", "numbers": []int{n, 1}}
			answer, err := client.ExecuteCode(context.Background(),
				SandboxRequest{Lang: "python", Script: script, Arguments: arguments})
			check(err)
			lines[n] = fmt.Sprintf("%s %s", answer.Returned, bytesOf(answer.Artifacts[0]))
		}(n)
	}
	all.Wait()
	for _, line := range lines {
		fmt.Println(line)
	}

	answer, err := client.ExecuteCode(context.Background(),
		SandboxRequest{Lang: "python", Script: "def main(): raise ValueError('no')"})
	check(err)
	fmt.Println(answer.Metadata["status"], answer.Metadata["exit_code"])

	_, err = client.ExecuteCode(context.Background(), SandboxRequest{Lang: "cobol", Script: "x"})
	fmt.Println("refused:", err)

	soon, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err = client.ExecuteCode(soon, SandboxRequest{Lang: "python", Script: "while True: pass"})
	fmt.Println("left:", err)
	check(client.(*PythonProviderManagerClient).Close())
}

func bytesOf(artifact map[string]any) string {
	path, isFile := artifact["path"].(string)
	if isFile {
		data, err := os.ReadFile(path)
		check(err)
		return fmt.Sprintf("%d bytes by file", len(data))
	}
	data, err := base64.StdEncoding.DecodeString(artifact["content_b64"].(string))
	check(err)
	return fmt.Sprintf("%d bytes inline", len(data))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
