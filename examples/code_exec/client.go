// Package main has Cofferdam run code for a Go program, through one bridge that stays warm.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
)

// SandboxRequest is one run. Timeout is seconds, 0 stands for COMPONENT_EXEC_TIMEOUT.
type SandboxRequest struct {
	Lang, Script string
	Arguments    map[string]any
	Timeout      int
}

// SandboxResponse is what came of it. Returned is the JSON of what main() returned, "" for nothing.
// An artifact has content_b64, or path where it is large. Metadata has status, exit_code, receipt.
type SandboxResponse struct {
	Stdout, Stderr, Returned string
	Artifacts                []map[string]any
	Error                    *struct{ Code, Message string }
	Metadata                 map[string]any
}

// SandboxClient is what the rest of an agent asks.
type SandboxClient interface {
	ExecuteCode(ctx context.Context, req SandboxRequest) (*SandboxResponse, error)
}

// PythonProviderManagerClient is a SandboxClient for any number of callers at once.
type PythonProviderManagerClient struct {
	process  *exec.Cmd
	requests io.WriteCloser
	toSend   sync.Mutex
	last     atomic.Uint64
	waiting  sync.Map // of the ids of calls: where their answers go
	ended    chan struct{}
}

// NewPythonProviderManagerClient starts the bridge. python is the knob code_exec_python_bin, the
// Python of Cofferdam's environment, and runs nothing of what is sent; manage is the path of its
// manage.py; folder takes large artifacts, for the caller to remove.
func NewPythonProviderManagerClient(python, manage, folder string) (*PythonProviderManagerClient, error) {
	process := exec.Command(python, manage, "code_exec", "--serve", "--artifacts", folder)
	process.Stderr = os.Stderr
	requests, err := process.StdinPipe()
	if err != nil {
		return nil, err
	}
	answers, err := process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := process.Start(); err != nil {
		return nil, err
	}
	c := &PythonProviderManagerClient{process: process, requests: requests, ended: make(chan struct{})}
	go c.read(json.NewDecoder(answers))
	return c, nil
}

// ExecuteCode runs code and waits for its end. When ctx is done the run is cancelled. Code that
// fails or takes too long is a response; what was refused or could not be run is an error.
func (c *PythonProviderManagerClient) ExecuteCode(ctx context.Context, req SandboxRequest) (*SandboxResponse, error) {
	answer := make(chan *SandboxResponse, 1)
	id := c.last.Add(1)
	c.waiting.Store(id, answer)
	if err := c.send(map[string]any{"id": id, "code": req.Script, "language": req.Lang,
		"arguments": req.Arguments, "timeout": req.Timeout}); err != nil {
		return nil, err
	}
	select {
	case response := <-answer:
		if response.Metadata["status"] == "error" {
			return nil, fmt.Errorf("code_exec: %s: %s", response.Error.Code, response.Error.Message)
		}
		return response, nil
	case <-ctx.Done():
		c.send(map[string]uint64{"cancel": id})
		return nil, ctx.Err()
	case <-c.ended:
		return nil, errors.New("code_exec: the bridge has ended; its last words are on stderr")
	}
}

// Close has the bridge answer what was asked, and end. Call it when every ExecuteCode has returned.
func (c *PythonProviderManagerClient) Close() error {
	c.requests.Close()
	<-c.ended
	return c.process.Wait()
}

func (c *PythonProviderManagerClient) send(frame any) error {
	c.toSend.Lock()
	defer c.toSend.Unlock()
	return json.NewEncoder(c.requests).Encode(frame)
}

func (c *PythonProviderManagerClient) read(answers *json.Decoder) {
	defer close(c.ended)
	for {
		var frame struct {
			ID uint64
			SandboxResponse
		}
		if answers.Decode(&frame) != nil {
			return
		}
		if answer, found := c.waiting.LoadAndDelete(frame.ID); found {
			answer.(chan *SandboxResponse) <- &frame.SandboxResponse
		}
	}
}
