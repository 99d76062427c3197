package conformance_test

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// inPython returns the Python in which make clients has installed the client. It skips the test if there is none.
func inPython(t *testing.T) string {
	t.Helper()
	program, err := filepath.Abs("../../bin/clients/python/venv/bin/python")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(program); err != nil {
		t.Skipf("%s is not here: make clients prepares it", program)
	}
	return program
}

// command runs a command in the folder of a client, and returns what it prints. It fails the test if the command does.
func command(t *testing.T, folder string, argv ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Dir = folder
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
	return string(out)
}

const pythonFolder = "../../clients/python"

func TestPython(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	process(t, inPython(t), pythonFolder+"/conformance/runner.py")
}

func TestPythonAsyncio(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	process(t, inPython(t), pythonFolder+"/conformance/runner.py", "--asyncio")
}

func TestPythonOwnTests(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	command(t, pythonFolder, inPython(t), "-m", "pytest", "-q", "-p", "no:cacheprovider")
	command(t, pythonFolder, inPython(t), "-m", "mypy", "--cache-dir="+t.TempDir())
}

// TestPythonMessagesAreCurrent compares the descriptors of the generated code with the contract.
func TestPythonMessagesAreCurrent(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	out := command(t, pythonFolder, inPython(t), "-c", `
import json
from kvcast.v1 import event_pb2, match_pb2, router_event_service_pb2, worker_pb2
print(json.dumps([m.DESCRIPTOR.serialized_pb.hex() for m in (event_pb2, match_pb2, worker_pb2, router_event_service_pb2)]))`)
	var texts []string
	if err := json.Unmarshal([]byte(out), &texts); err != nil {
		t.Fatal(err)
	}
	for i, file := range []protoreflect.FileDescriptor{
		kvcastv1.File_kvcast_v1_event_proto, kvcastv1.File_kvcast_v1_match_proto, kvcastv1.File_kvcast_v1_worker_proto,
		kvcastv1.File_kvcast_v1_router_event_service_proto,
	} {
		b, err := hex.DecodeString(texts[i])
		got := new(descriptorpb.FileDescriptorProto)
		if err == nil {
			err = proto.Unmarshal(b, got)
		}
		if err != nil {
			t.Fatal(err)
		}
		want := protodesc.ToFileDescriptorProto(file)
		for _, f := range []*descriptorpb.FileDescriptorProto{got, want} {
			withoutJSONNames(f.GetMessageType())
		}
		if !proto.Equal(got, want) {
			t.Errorf("%s differs from the contract: run clients/python/generate.sh", file.Path())
		}
	}
}

// withoutJSONNames removes names that not all compilers set.
func withoutJSONNames(all []*descriptorpb.DescriptorProto) {
	for _, m := range all {
		for _, f := range m.GetField() {
			f.JsonName = nil
		}
		withoutJSONNames(m.GetNestedType())
	}
}
