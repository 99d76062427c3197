package kubernetes_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/kubernetes"
)

// TestMakePrintsTheCommandsOfDeployments checks what the targets of deploy/deploy.mk would execute.
func TestMakePrintsTheCommandsOfDeployments(t *testing.T) {
	requireMake(t)
	const (
		dir = "deploy/manifests/zmq-listener/"
		img = "registry.example/llm/kvcast:v1"
	)
	listen := []string{
		"kubectl apply -n llm -f " + dir + "service.yaml",
		"kubectl set image --local -o yaml -f " + dir + "listener.yaml listener=" + img + " | kubectl apply -n llm -f -",
	}
	vllm, sim := "kubectl apply -n llm -f "+dir+"vllm.yaml", "kubectl apply -n llm -f "+dir+"sim.yaml"
	deleteListener := "kubectl delete -n llm --ignore-not-found -f " + dir + "listener.yaml -f " + dir + "service.yaml"
	deleteVLLM, deleteSim := "kubectl delete -n llm --ignore-not-found -f "+dir+"vllm.yaml", "kubectl delete -n llm --ignore-not-found -f "+dir+"sim.yaml"
	const platforms = "--platform linux/amd64,linux/arm64 "
	args := "--build-arg VERSION=v1 --build-arg REVISION=$(git rev-parse HEAD) "
	built := []string{"podman manifest rm " + img, "podman build --format docker " + platforms + "--build-arg BUILDPLATFORM=linux/$(go env GOHOSTARCH) " + args + "--manifest " + img + " ."}
	for _, test := range []struct {
		target string
		args   []string
		want   []string
	}{
		{"zmq-image-build", []string{"CONTAINER_TOOL=docker"}, []string{"docker buildx build " + platforms + args + "-t " + img + " ."}},
		{"zmq-image-push", []string{"CONTAINER_TOOL=docker"}, []string{"docker buildx build " + platforms + args + "-t " + img + " --push ."}},
		{"zmq-image-build", []string{"CONTAINER_TOOL=podman"}, built},
		{"zmq-image-push", []string{"CONTAINER_TOOL=podman"}, append(built[:2:2], "podman manifest push --all "+img+" docker://"+img)},
		{"deploy-zmq-listener", nil, listen},
		{"deploy-vllm", nil, []string{vllm}},
		{"deploy-sim", nil, []string{sim}},
		{"deploy-zmq-all", nil, append(listen[:2:2], vllm, sim)},
		{"delete-zmq-listener", nil, []string{deleteListener}},
		{"delete-vllm", nil, []string{deleteVLLM}},
		{"delete-sim", nil, []string{deleteSim}},
		{"delete-zmq-all", nil, []string{deleteSim, deleteVLLM, deleteListener}},
		{"clean-zmq", []string{"CONTAINER_TOOL=docker"}, []string{deleteSim, deleteVLLM, deleteListener, "docker image rm " + img}},
		{"clean-zmq", []string{"CONTAINER_TOOL=buildah"}, []string{deleteSim, deleteVLLM, deleteListener, "buildah manifest rm " + img}},
		{"deploy-vllm", []string{"NAMESPACE=", "KUBECTL=kubectl --context=test"}, []string{"kubectl --context=test apply -n  -f " + dir + "vllm.yaml"}},
	} {
		all := append([]string{"-n", test.target, "NAMESPACE=llm", "ZMQ_IMAGE_REGISTRY=registry.example/llm", "ZMQ_IMAGE_TAG=v1", "VERSION=v1"}, test.args...)
		printed := run(t, nil, "make", all...)
		if diff := cmp.Diff(test.want, strings.Split(strings.TrimSpace(printed), "\n")); diff != "" {
			t.Errorf("make %s (-want +got):\n%s", strings.Join(all, " "), diff)
		}
	}
	if printed := run(t, nil, "make", "-n", "deploy-vllm"); !strings.Contains(printed, " -n default ") {
		t.Errorf("make -n deploy-vllm: got %s, want the namespace default", printed)
	}
}

// TestListenerIsDeployed deploys and deletes everything with make on a real API server.
func TestListenerIsDeployed(t *testing.T) {
	testclass.Packaging(t)
	requireMake(t)
	s := kubernetes.Start(t)
	kubernetes.Program(t, "kubectl", "kube-apiserver")
	run(t, s, "kubectl", "create", "namespace", "llm")
	set := []string{"NAMESPACE=llm", "ZMQ_IMG=registry.example/kvcast:v1"}
	run(t, s, "make", append(set, "deploy-zmq-all")...) // kubectl apply fails if a field is unknown

	var objects struct {
		Items []struct {
			Kind     string
			Metadata struct{ Name string }
			Spec     struct {
				ClusterIP string
				Template  struct {
					Spec struct {
						Containers []struct {
							Image     string
							Env       []struct{ Name, Value string }
							Args      []string
							Resources struct{ Requests, Limits map[string]string }
						}
					}
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(run(t, s, "kubectl", "get", "deployments,services", "-n", "llm", "-o", "json")), &objects); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range objects.Items {
		names = append(names, o.Kind+" "+o.Metadata.Name)
		switch o.Metadata.Name {
		case "zmq-listener":
			c := o.Spec.Template.Spec.Containers[0]
			if c.Image != "registry.example/kvcast:v1" || c.Env[0].Name != "ZMQ_PORT" || c.Env[0].Value != "5557" {
				t.Errorf("zmq-listener: got %+v, want the image of ZMQ_IMG and ZMQ_PORT 5557", c)
			}
			if diff := cmp.Diff([2]map[string]string{{"cpu": "100m", "memory": "256Mi"}, {"cpu": "500m", "memory": "512Mi"}},
				[2]map[string]string{c.Resources.Requests, c.Resources.Limits}); diff != "" {
				t.Errorf("resources of zmq-listener (-want +got):\n%s", diff)
			}
		case "zmq-listener-service":
			if o.Spec.ClusterIP != "None" {
				t.Errorf("zmq-listener-service: cluster IP %q, want a headless service", o.Spec.ClusterIP)
			}
		case "vllm":
			checkEventsConfig(t, o.Spec.Template.Spec.Containers[0].Args[0])
		}
	}
	if diff := cmp.Diff([]string{"Deployment sim", "Deployment vllm", "Deployment zmq-listener", "Service zmq-listener-service"}, names); diff != "" {
		t.Errorf("deployed (-want +got):\n%s", diff)
	}

	run(t, s, "make", append(set, "delete-zmq-all")...)
	if left := run(t, s, "kubectl", "get", "deployments,services", "-n", "llm"); !strings.HasPrefix(left, "No resources found") {
		t.Errorf("left after delete-zmq-all:\n%s", left)
	}
}

// checkEventsConfig runs vLLM's command line with a program that prints its arguments in place of vLLM, and checks the
// JSON that vLLM would get.
func checkEventsConfig(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "vllm"), []byte("#!/bin/sh\nfor last; do :; done\necho \"$last\"\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	cmd := command(t, nil, "/bin/sh", "-c", script)
	cmd.Env = []string{"PATH=" + dir, "POD_IP=10.1.2.3"}
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("run vLLM's command line: %v", err)
	}
	var got map[string]any
	if err := json.Unmarshal(output, &got); err != nil {
		t.Fatalf("--kv-events-config %s: %v", output, err)
	}
	want := map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://zmq-listener-service:5557",
		"replay_endpoint": "tcp://*:5558", "topic": "kv@10.1.2.3@Qwen/Qwen3-0.6B",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("--kv-events-config (-want +got):\n%s", diff)
	}
}
