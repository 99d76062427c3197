package kubernetes_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/fleet"
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
	if err != nil || len(files) < 9 {
		t.Fatalf("values of variants: got %q, %v; want at least 9", files, err)
	}
	return files
}

// object is a part of a Kubernetes object.
type object struct {
	Kind     string
	Metadata struct{ Name string }
	Data     map[string]string
	Spec     struct {
		Template   map[string]any
		Containers []struct{ Args []string } // of a pod
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
					createPod(t, s, name, o.Metadata.Name+"-0", o.Spec.Template)
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
func createPod(t *testing.T, s *kubernetes.APIServer, namespace, name string, template map[string]any) {
	t.Helper()
	spec := template["spec"].(map[string]any)
	for _, mount := range spec["containers"].([]any)[0].(map[string]any)["volumeMounts"].([]any) {
		if mount.(map[string]any)["name"] == "journal" { // the volume that a StatefulSet makes
			claim := map[string]any{"name": "journal", "persistentVolumeClaim": map[string]any{"claimName": "journal-" + name}}
			spec["volumes"] = append(spec["volumes"].([]any), claim)
		}
	}
	template["apiVersion"], template["kind"] = "v1", "Pod"
	template["metadata"].(map[string]any)["name"] = name
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
	for name := range config {
		if filepath.Ext(name) == ".yaml" {
			run(t, nil, program, "serve", "--config", filepath.Join(dir, "config", name), "--check")
		}
	}
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
		{"image.tag=latest", "image.tag is latest"},
		{"image.digest=sha256:12", "digest"},
		{"journal.nats.clientCertificate=true", "journal.nats.clientCertificate is true: want journal.nats.tlsSecret as well"},
		{"config.journal.store=memory", "config.journal.store is not allowed"},
		{"config.journal.tls_ca=x", "config.journal.tls_ca is not allowed"},
		{"listeners[0].name=a,listeners[0].port=9464", "listeners[0].port is 9464, which the admin port has"},
		{"listeners[0].name=a,listeners[0].port=50051", "listeners[0].port is 50051, which the gRPC port has"},
		{"listeners[0].name=a,listeners[0].port=1,listeners[1].name=b,listeners[1].port=1", "listeners[1].port is 1, which listeners[0] has"},
		{"listeners[0].name=a,listeners[0].port=1,listeners[1].name=a,listeners[1].port=2", "listeners[1].name is a, which listeners[0] has"},
		{"routerPorts[0].name=x,routerPorts[0].port=8091", "routerPorts[0].port is 8091, at which nothing listens"},
		{"config.egress.dynamo.listen=:8091", "config.egress.dynamo.listen is at port 8091, which no entry of routerPorts has"},
		{"config.egress.zmq.bind=tcp://*:5557", "config.egress.zmq.bind is at port 5557, which listeners[0] has"},
		{"config.egress.zmq.publishers[0].replay=tcp://*:6000,config.egress.zmq.publishers[0].dp_size=2,routerPorts[0].name=a,routerPorts[0].port=6000",
			"config.egress.zmq.publishers[0].replay is at port 6001, which no entry of routerPorts has"},
		{"journal.store=file,journal.file.size=32Mi", "journal.file.size is 32Mi, less than config.journal.max_bytes (64MiB)"},
		{"journal.store=file,config.journal.max_bytes=11GiB", "journal.file.size is 10Gi, less than config.journal.max_bytes (11GiB)"},
		{"podDisruptionBudget.maxUnavailable=0", "podDisruptionBudget.maxUnavailable is 0, which blocks each drain"},
		{"podDisruptionBudget.maxUnavailable=0%", "podDisruptionBudget.maxUnavailable is 0%, which blocks each drain"},
		{"podDisruptionBudget.minAvailable=1", "podDisruptionBudget.minAvailable is 1 of 1 replicas, which blocks each drain"},
		{"podDisruptionBudget.minAvailable=51%,replicas=2,listeners=null", "podDisruptionBudget.minAvailable is 51% of 2 replicas, which blocks each drain"},
		{"podDisruptionBudget.minAvailable=1,podDisruptionBudget.maxUnavailable=1", "want one of them"},
		{"resources.requests.memory=1Gi", "resources.requests.memory is 1Gi, more than resources.limits.memory (512Mi)"},
		{"resources.requests.cpu=0.6", "resources.requests.cpu is 0.6, more than resources.limits.cpu (500m)"},
		{"resources.limits.memory=1x", "\"1x\" is not a quantity"},
		{"serveOnly.replicas=1", "serveOnly has servers with the journal in memory"},
		{"config.cluster.serve=false", "config.cluster.serve is false without servers of serveOnly"},
		{"config.cluster.ingest=false", "config.cluster.ingest is false: want serveOnly.replicas"},
		{"serveOnly.autoscaling.enabled=true,serveOnly.autoscaling.maxReplicas=1,journal.store=nats,journal.nats.servers[0]=nats://nats:4222", "serveOnly.autoscaling.minReplicas is 2, more than maxReplicas (1)"},
		{"service.nodePorts.grpc=30051", "service.nodePorts is not empty: want service.type NodePort or LoadBalancer"},
		{"service.type=NodePort,service.nodePorts.admin=30051", "service.nodePorts.admin: there is no such port"},
		{"service.loadBalancerSourceRanges[0]=10.0.0.0/8", "want service.type LoadBalancer"},
	} {
		cmd := command(t, nil, "helm", "template", "kvcast", chart, "--set", test.set)
		output, err := cmd.CombinedOutput()
		if exit := new(exec.ExitError); !errors.As(err, &exit) || !strings.Contains(string(output), test.want) {
			t.Errorf("--set %s: got %v, %s; want an error with %q", test.set, err, output, test.want)
		}
	}
}

// TestChartAcceptsLimits checks values that are just allowed.
func TestChartAcceptsLimits(t *testing.T) {
	testclass.Packaging(t)
	requireCharts(t)
	for _, set := range []string{
		"config.egress.dynamo.listen=127.0.0.1:8091",
		"config.egress.dynamo.listen=:8091,routerPorts[0].name=dynamo,routerPorts[0].port=8091",
		"journal.store=file,journal.file.size=64Mi",
		"podDisruptionBudget.minAvailable=50%,replicas=2,listeners=null",
		"podDisruptionBudget.minAvailable=1,podDisruptionBudget.enabled=false",
		"resources.requests.memory=536870912,resources.requests.cpu=0.5",
		"resources.limits=null,resources.requests.memory=1Gi",
	} {
		run(t, nil, "helm", "template", "kvcast", chart, "--set", set)
	}
}

// TestChartREADMEHasAllValues compares the table of values with values.yaml.
func TestChartREADMEHasAllValues(t *testing.T) {
	testclass.Packaging(t)
	kubernetes.Program(t, "tools/helm-docs", "deploy-check")
	got, err := os.ReadFile(filepath.Join(kubernetes.Root(t), chart, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	if want := run(t, nil, "helm-docs", "--dry-run", "--log-level", "warning", "--chart-search-root", "deploy/helm"); strings.TrimSpace(string(got)) != strings.TrimSpace(want) {
		t.Error("the chart's README.md is not what values.yaml and README.md.gotmpl say: run make chart-docs")
	}
}

// TestPodOfHelmTestAsksTheServer runs what the pod of helm test runs, against a server with TLS and tokens.
func TestPodOfHelmTestAsksTheServer(t *testing.T) {
	testclass.Packaging(t)
	requireCharts(t)
	program, err := harness.Program(false)
	if err != nil {
		t.Fatal(err)
	}
	args := func(set string) []string {
		manifest := run(t, nil, "helm", "template", "kvcast", chart, "--namespace", "llm", "--show-only", "templates/tests/status.yaml", "--set", set)
		return objects(t, manifest)[0].Spec.Containers[0].Args
	}
	dir := t.TempDir()
	run(t, nil, "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", "/CN=kvcast",
		"-addext", "subjectAltName=DNS:localhost", "-keyout", filepath.Join(dir, "tls.key"), "-out", filepath.Join(dir, "ca.crt"))
	tokens := filepath.Join(dir, "tokens")
	if err := os.WriteFile(tokens, []byte("router 0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	plain := fleet.Address(t, fleet.Start(t, "--bind", "tcp://127.0.0.1:0"))
	secured := fleet.Address(t, fleet.Start(t, "--bind", "tcp://127.0.0.1:0",
		"--tls-cert", filepath.Join(dir, "ca.crt"), "--tls-key", filepath.Join(dir, "tls.key"), "--auth-tokens", tokens))
	for _, test := range []struct {
		set, addr     string // the values, and the address that the pod calls
		server, token string
		want          bool
	}{
		{"tls.secret=", "kvcast.llm.svc:50051", plain, "", true},
		{"tls.secret=kvcast-tls,auth.tokensSecret=kvcast-tokens,test.tokenSecret=router", "kvcast.llm.svc:50051", secured, "0123456789abcdef", true},
		{"tls.secret=kvcast-tls,auth.tokensSecret=kvcast-tokens", "kvcast.llm.svc:50051", secured, "", false},
		{"serveOnly.replicas=1,journal.store=nats,journal.nats.servers[0]=nats://nats:4222", "kvcast-serve.llm.svc:50051", plain, "", true},
	} {
		_, port, _ := strings.Cut(test.server, ":")
		command := args(test.set)
		at := slices.Index(command, test.addr)
		if at < 0 {
			t.Fatalf("--set %s: the pod runs kvcast %q, want the address %s", test.set, command, test.addr)
		}
		command[at] = "localhost:" + port
		for i := range command {
			command[i] = strings.Replace(command[i], "/etc/kvcast/", dir+"/", 1)
		}
		cmd := exec.CommandContext(harness.Context(t), program, command...)
		cmd.Env = append(os.Environ(), "KVCAST_TOKEN="+test.token)
		if output, err := cmd.CombinedOutput(); (err == nil) != test.want {
			t.Errorf("--set %s: kvcast %q: %v, %s; want success: %t", test.set, command, err, output, test.want)
		}
	}
}
