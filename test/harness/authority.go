package harness

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority is a CA of certificates for 127.0.0.1.
type Authority struct {
	// File has the CA's certificate in PEM.
	File string

	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority returns a CA whose certificate is valid for an hour.
func NewAuthority(t *testing.T) *Authority {
	t.Helper()
	a := &Authority{t: t, File: filepath.Join(t.TempDir(), "ca.pem"), key: newKey(t)}
	a.cert = certificateTemplate("CA")
	a.cert.IsCA, a.cert.BasicConstraintsValid, a.cert.KeyUsage = true, true, x509.KeyUsageCertSign
	a.sign(a.cert, a.key, a.File)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func certificateTemplate(commonName string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: commonName},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
}

func (a *Authority) sign(template *x509.Certificate, key *ecdsa.PrivateKey, file string) {
	a.t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.writePEM(file, "CERTIFICATE", der)
}

func (a *Authority) writePEM(file, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// Issue returns the files of a certificate for 127.0.0.1, of servers and of clients, with a common name and DNS names, and of
// its key.
func (a *Authority) Issue(commonName string, dnsNames ...string) (cert, key string) {
	a.t.Helper()
	return a.IssueWith(commonName, func(c *x509.Certificate) { c.DNSNames = dnsNames })
}

// IssueWith is Issue of a certificate that a function changes before it is signed.
func (a *Authority) IssueWith(commonName string, change func(*x509.Certificate)) (cert, key string) {
	a.t.Helper()
	dir := a.t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	private := newKey(a.t)
	template := certificateTemplate(commonName)
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	change(template)
	a.sign(template, private, cert)
	der, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		a.t.Fatal(err)
	}
	a.writePEM(key, "EC PRIVATE KEY", der)
	return cert, key
}
