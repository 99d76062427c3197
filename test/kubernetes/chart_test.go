package kubernetes_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/kubernetes"
)

const chart = "deploy/helm/kvcast"

// requireCharts skips the test if a program that checks charts is missing.
func requireCharts(t *testing.T) {
	t.Helper()
	kubernetes.Program(t, "tools/helm", "deploy-check")
	kubernetes.Program(t, "tools/kubeconform", "deploy-check")
	kubernetes.Program(t, "kubectl", "deploy-check")
}

// variants returns the values files of the chart's variants.
func variants(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(kubernetes.Root(t), chart, "ci", "*.yaml"))
	if err != nil || len(files) < 7 {
		t.Fatalf("values of variants: got %q, %v; want at least 7", files, err)
	}
	return files
}

// object is a part of a Kubernetes object.
type object struct {
	Kind string
	Data map[string]string
	Spec struct {
		Template map[string]any
	}
}

// objects decodes the YAML documents of a manifest.
func objects(t *testing.T, manifest string) (all []object) {
	t.Helper()
	for documents := yaml.NewDecoder(strings.NewReader(manifest)); ; {
		var o object
		switch err := documents.Decode(&o); {
		case errors.Is(err, io.EOF):
			return all
		case err != nil:
			t.Fatal(err)
		}
		all = append(all, o)
	}
}

// TestChartIsAcceptedByTheAPIServer lints and renders the variants of the chart, and checks the objects by kubeconform with the
// API server's schemas, by a dry run, and by installing the chart. A pod of each variant is admitted to a namespace that enforces
// the restricted Pod Security Standard, and kvcast accepts the configuration file.
func TestChartIsAcceptedByTheAPIServer(t *testing.T) {
	testclass.Packaging(t)
	requireCharts(t)
	s := kubernetes.Start(t)
	createMonitoringKinds(t, s)
	schemas := writeSchemas(t, s)
	for _, values := range variants(t) {
		name := strings.TrimSuffix(filepath.Base(values), ".yaml")
		t.Run(name, func(t *testing.T) {
			run(t, nil, "helm", "lint", "--strict", chart, "-f", values)
			manifest := run(t, nil, "helm", "template", "kvcast", chart, "--namespace", name, "-f", values)
			runWith(t, nil, manifest, "kubeconform", "-strict", "-summary", "-schema-location", schemas, "-")
			runWith(t, s, "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: "+name+
				"\n  labels: {pod-security.kubernetes.io/enforce: restricted}\n", "kubectl", "create", "-f", "-")
			runWith(t, s, manifest, "kubectl", "create", "-n", name, "--dry-run=server", "-f", "-")
			run(t, s, "helm", "install", "kvcast", chart, "--namespace", name, "-f", values)
			for _, o := range objects(t, manifest) {
				switch o.Kind {
				case "ConfigMap":
					checkConfig(t, s, o.Data)
				case "Deployment", "StatefulSet":
					createPod(t, s, name, o.Spec.Template)
				}
			}
		})
	}
}

// createMonitoringKinds makes the API server know kinds of Prometheus Operator.
func createMonitoringKinds(t *testing.T, s *kubernetes.APIServer) {
	t.Helper()
	run(t, s, "kubectl", "create", "-f", "test/kubernetes/testdata/prometheus-operator.yaml")
	run(t, s, "kubectl", "wait", "--for=condition=Established", "crd/servicemonitors.monitoring.coreos.com", "crd/prometheusrules.monitoring.coreos.com")
	harness.WaitFor(t, func() bool { // the document is updated later
		return strings.Contains(run(t, s, "kubectl", "get", "--raw", "/openapi/v2"), "com.coreos.monitoring.v1.ServiceMonitor\"")
	})
}

// createPod creates a pod from a template.
func createPod(t *testing.T, s *kubernetes.APIServer, namespace string, template map[string]any) {
	t.Helper()
	spec := template["spec"].(map[string]any)
	for _, mount := range spec["containers"].([]any)[0].(map[string]any)["volumeMounts"].([]any) {
		if mount.(map[string]any)["name"] == "journal" { // the volume that a StatefulSet makes
			claim := map[string]any{"name": "journal", "persistentVolumeClaim": map[string]any{"claimName": "journal-kvcast-0"}}
			spec["volumes"] = append(spec["volumes"].([]any), claim)
		}
	}
	template["apiVersion"], template["kind"] = "v1", "Pod"
	template["metadata"].(map[string]any)["name"] = "kvcast-0"
	pod, err := json.Marshal(template)
	if err != nil {
		t.Fatal(err)
	}
	runWith(t, s, string(pod), "kubectl", "create", "-n", namespace, "-f", "-")
}

// checkConfig checks the files of a ConfigMap by kvcast serve --check, with files in place of the secrets' volumes.
func checkConfig(t *testing.T, s *kubernetes.APIServer, config map[string]string) {
	t.Helper()
	dir := t.TempDir()
	cert, err := os.ReadFile(s.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(filepath.Join(filepath.Dir(s.CAFile), "apiserver.key"))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{
		"tls/tls.crt": string(cert), "tls/tls.key": string(key), "tls/ca.crt": string(cert), "auth/tokens": "router 0123456789abcdef\n",
	}
	for name, text := range config {
		files["config/"+name] = strings.ReplaceAll(text, "/etc/kvcast/", dir+"/")
	}
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program, err := harness.Program(false)
	if err != nil {
		t.Fatal(err)
	}
	run(t, nil, program, "serve", "--config", filepath.Join(dir, "config", "kvcast.yaml"), "--check")
}

// TestChartGrantsWhatDiscoveryNeeds checks what the service account may do.
func TestChartGrantsWhatDiscoveryNeeds(t *testing.T) {
	testclass.Packaging(t)
	requireCharts(t)
	s := kubernetes.Start(t)
	for _, namespace := range []string{"llm", "other", "third"} {
		run(t, s, "kubectl", "create", "namespace", namespace)
	}
	// kubectl knows only the groups of resources that the API server serves.
	definition := filepath.Join(t.TempDir(), "inferencepools.json")
	if err := os.WriteFile(definition, []byte(`{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": {"name": "inferencepools.inference.networking.k8s.io", "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
		"spec": {
			"group": "inference.networking.k8s.io", "scope": "Namespaced", "names": {"kind": "InferencePool", "plural": "inferencepools"},
			"versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]
		}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, s, "kubectl", "apply", "--validate=false", "-f", definition)
	run(t, s, "kubectl", "wait", "--for=condition=established", "--timeout=120s", "crd/inferencepools.inference.networking.k8s.io")
	canI := func(account, verb, resource, namespace string) bool {
		cmd := command(t, s, "kubectl", "auth", "can-i", verb, resource, "-n", namespace, "--as", "system:serviceaccount:llm:"+account)
		output, err := cmd.Output() // fails if the answer is no
		answer := strings.TrimSpace(string(output))
		if answer != "yes" && answer != "no" {
			t.Fatalf("kubectl auth can-i %s %s: %q, %v", verb, resource, output, err)
		}
		return answer == "yes"
	}
	for _, test := range []struct {
		release, discovery string
		namespaces         []string
	}{
		{"none", `[]`, nil},
		{"own", `[{"kubernetes": "app=vllm"}]`, []string{"llm"}},
		{"two", `[{"kubernetes": "app=vllm"}, {"kubernetes": "app=sim", "namespaces": ["llm", "other"]}]`, []string{"llm", "other"}},
		{"pool", `[{"inference_pool": "vllm"}, {"inference_pool": "vllm", "namespaces": ["other"]}]`, []string{"llm", "other"}},
		{"all", `[{"kubernetes": "app=vllm", "namespaces": ["*"]}]`, []string{"llm", "other", "third"}},
	} {
		run(t, s, "helm", "install", test.release, chart, "-n", "llm", "--set-json", "discovery="+test.discovery)
		manifest := run(t, s, "helm", "get", "manifest", test.release, "-n", "llm")
		account := test.release + "-kvcast"
		for _, namespace := range []string{"llm", "other", "third"} {
			want := strings.Contains(" "+strings.Join(test.namespaces, " ")+" ", " "+namespace+" ")
			for _, verb := range []string{"get", "list", "watch"} {
				if got := canI(account, verb, "pods", namespace); got != want {
					t.Errorf("%s: may %s pods in %s: %t, want %t", test.release, verb, namespace, got, want)
				}
			}
		}
		if got, want := canI(account, "get", "inferencepools.inference.networking.k8s.io", "llm"), test.release == "pool"; got != want {
			t.Errorf("%s: may get InferencePools: %t, want %t", test.release, got, want)
		}
		if canI(account, "delete", "pods", "llm") || canI(account, "get", "secrets", "llm") {
			t.Errorf("%s: may delete pods or get secrets, want neither", test.release)
		}
		wantToken := "automountServiceAccountToken: false\n      enableServiceLinks"
		if test.namespaces != nil {
			wantToken = "automountServiceAccountToken: true\n      enableServiceLinks"
		}
		if !strings.Contains(manifest, wantToken) {
			t.Errorf("%s: the manifest does not have %s", test.release, wantToken)
		}
	}
}

func TestChartRejectsMistakes(t *testing.T) {
	testclass.Packaging(t)
	requireCharts(t)
	for _, test := range []struct{ set, want string }{
		{"replicas=2", "replicas is 2 with listeners and the journal in memory: each pod would have other engines"},
		{"journal.store=nats", "journal.nats.servers is empty: want URLs such as nats://nats:4222"},
		{"config.listen=:1", "config.listen is not allowed: the chart sets it"},
		{"journal.store=disk", "journal"},
		{"replica=2", "replica"},
		{"listeners[0].port=70000", "listeners"},
		{"listeners[0].bind=x", "listeners"},
		{"service.type=ExternalName", "service"},
		{"terminationGracePeriodSeconds=5", "terminationGracePeriodSeconds"},
	} {
		cmd := command(t, nil, "helm", "template", "kvcast", chart, "--set", test.set)
		output, err := cmd.CombinedOutput()
		if exit := new(exec.ExitError); !errors.As(err, &exit) || !strings.Contains(string(output), test.want) {
			t.Errorf("--set %s: got %v, %s; want an error with %q", test.set, err, output, test.want)
		}
	}
}
