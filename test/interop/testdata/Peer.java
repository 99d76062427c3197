import java.nio.charset.StandardCharsets;
import java.util.Scanner;
import org.zeromq.SocketType;
import org.zeromq.ZContext;
import org.zeromq.ZMQ;

/** A publisher in Java, with JeroMQ. The comment of package interop describes its input and output. */
public final class Peer {
    private static byte[] frame(int size) {
        byte[] frame = new byte[size];
        for (int i = 0; i < size; i++) {
            frame[i] = (byte) (i % 251);
        }
        return frame;
    }

    public static void main(String[] args) {
        String endpoint = args[2];
        int heartbeat = Integer.parseInt(args[3]);
        try (ZContext context = new ZContext()) {
            ZMQ.Socket socket = context.createSocket(SocketType.PUB);
            socket.setSndHWM(0);
            socket.setLinger(0);
            socket.setIPv6(endpoint.contains("["));
            if (heartbeat > 0) {
                socket.setHeartbeatIvl(heartbeat);
                socket.setHeartbeatTimeout(60_000);
            }
            if (args[1].equals("bind")) {
                socket.bind(endpoint);
                endpoint = socket.getLastEndpoint();
            } else {
                socket.connect(endpoint);
            }
            System.out.println(endpoint);
            Scanner in = new Scanner(System.in);
            while (in.hasNextLine()) {
                String[] words = in.nextLine().split(" ");
                socket.send(words[0].getBytes(StandardCharsets.UTF_8), words.length > 1 ? ZMQ.SNDMORE : 0);
                for (int i = 1; i < words.length; i++) {
                    socket.send(frame(Integer.parseInt(words[i])), i < words.length - 1 ? ZMQ.SNDMORE : 0);
                }
                System.out.println("sent");
            }
        }
    }
}
